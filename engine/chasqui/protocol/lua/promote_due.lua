-- Moves due jobs from the delayed set to the stream, as leader.
-- Race: two promoters: the lease is taken or renewed in the same step, and a member is removed as it is added, so none
-- is promoted twice even by a leader that does not know it was replaced. A member that is no job goes to the dead
-- letters, and the others go on. At the cap jobs stay where they are, and so does what cannot be added; what was added
-- before it is removed all the same. Where nothing could be handled the answer is the error. As in retry_later what takes
-- out is tried first.
-- KEYS[1] delayed
-- KEYS[2] stream
-- KEYS[3] lock
-- KEYS[4] dlq
-- ARGV[1] holder
-- ARGV[2] ttl_ms
-- ARGV[3] batch
-- ARGV[4] cap       hold when the stream has so many; 0 = never
-- ARGV[5] trim      MAXLEN ~ of each XADD; 0 = none
-- ARGV[6] dlq_len   MAXLEN ~ of the dead letters
-- ARGV[7] tell      1: return the envelopes of all jobs moved; 0: not of those whose id has 26 letters, as made ones have
-- returns {-1} another leads; else {members handled, jobs moved, left, lag in ms of the oldest left, envelopes}
local delayed, stream, lock, dlq = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, ttl_ms, batch = ARGV[1], ARGV[2], tonumber(ARGV[3])
local cap, trim, dlq_len, tell = tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7] == '1'
local call, try, sub, byte, u32 = redis.call, redis.pcall, string.sub, string.byte, struct.unpack
local current = call('GET', lock)
if current and current ~= holder then return { -1 } end
for key, wanted in pairs({ [delayed] = 'zset', [stream] = 'stream' }) do
  local found = call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
call('SET', lock, holder, 'PX', ttl_ms)
call('ZREM', delayed, 'no member')
local time = call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if cap > 0 then batch = math.min(batch, cap - call('XLEN', stream)) end
local envelopes, handled, moved, size, failed = {}, {}, 0, 0, nil
if batch > 0 then
  for _, member in ipairs(call('ZRANGEBYSCORE', delayed, '-inf', string.format('%.0f', now), 'LIMIT', 0, batch)) do
    local length = #member >= 4 and u32('<I4', member) or nil
    local whole, reply = length and 4 + length <= #member, nil
    if not whole then
      reply = try('XADD', dlq, 'MAXLEN', '~', dlq_len, '*', 'd', member, 'source_id', '', 'reason', 'malformed',
        'detail', 'delayed member without a whole name')
    else
      local name, envelope = sub(member, 5, 4 + length), sub(member, 5 + length)
      if trim ~= '0' then
        if name == '' then reply = try('XADD', stream, 'MAXLEN', '~', trim, '*', 'd', envelope)
        else reply = try('XADD', stream, 'MAXLEN', '~', trim, '*', 'd', envelope, 'n', name) end
      elseif name == '' then reply = try('XADD', stream, '*', 'd', envelope)
      else reply = try('XADD', stream, '*', 'd', envelope, 'n', name) end
      if type(reply) ~= 'table' then
        moved = moved + 1
        if tell or byte(envelope, 2) ~= 186 then envelopes[#envelopes + 1] = envelope end
      end
    end
    if type(reply) ~= 'table' then handled[#handled + 1] = member
    else
      failed = reply
      if whole then break end
    end
    size = size + #member
    if size > 1048576 then break end
  end
  if #handled > 0 then call('ZREM', delayed, unpack(handled)) end
end
if failed and #handled == 0 then return failed end
local lag = 0
local first = call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
if first[2] then lag = math.min(now, math.max(0, math.floor(now - tonumber(first[2])))) end
return { #handled, moved, call('ZCARD', delayed), lag, envelopes }
