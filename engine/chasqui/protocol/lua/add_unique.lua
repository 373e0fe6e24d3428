-- Adds jobs that have ids, immediate or delayed, each id once while its marker lives.
-- Race: two processes, or one that lost the reply, add the same id: SET NX decides, in the same step as the add.
-- Nothing is written when the stream is full or a key has the wrong type: both are looked at first. Where an add is
-- refused all the same, its id is free again.
-- KEYS[1] stream
-- KEYS[2] delayed
-- KEYS[3...] two per job: dedup marker, index of delayed members
-- ARGV[1] cap     refuse when the stream holds this many and a job is for it; 0 = never
-- ARGV[2] trim    MAXLEN ~ of each XADD; 0 = none
-- ARGV[3...] four per job: run-at ("" = now), marker's TTL in s, envelope (now) or member (delayed), name
-- returns a list, a job each: 1 added, 0 that id is taken; or -1 full
local stream, delayed = KEYS[1], KEYS[2]
local cap, trim = tonumber(ARGV[1]), ARGV[2]
local call = redis.call
for key, wanted in pairs({ [stream] = 'stream', [delayed] = 'zset' }) do
  local found = call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
if cap > 0 and call('XLEN', stream) >= cap then
  for i = 3, #ARGV, 4 do
    if ARGV[i] == '' and call('EXISTS', KEYS[3 + (i - 3) / 2]) == 0 then return -1 end
  end
end
local added = {}
for i = 3, #ARGV, 4 do
  local run_at, ttl, bytes, name = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local k = 3 + (i - 3) / 2
  if not call('SET', KEYS[k], '1', 'NX', 'EX', ttl) then
    added[#added + 1] = 0
  else
    local reply
    if run_at ~= '' then
      reply = redis.pcall('ZADD', delayed, run_at, bytes)
    else
      local args = { 'XADD', stream, '*', 'd', bytes }
      if trim ~= '0' then args = { 'XADD', stream, 'MAXLEN', '~', trim, '*', 'd', bytes } end
      if name ~= '' then
        args[#args + 1] = 'n'
        args[#args + 1] = name
      end
      reply = redis.pcall(unpack(args))
    end
    if type(reply) == 'table' then
      call('DEL', KEYS[k])
      return reply
    end
    if run_at ~= '' then call('SET', KEYS[k + 1], bytes, 'EX', ttl) end
    added[#added + 1] = 1
  end
end
return added
