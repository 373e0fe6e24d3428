-- Moves chosen members of the delayed set to the stream before their time.
-- Race: against the promoter, a cancel, or another call like this: whoever removes the member has the job. It is removed
-- after the add: a write that is refused leaves it where it is. As in retry_later what takes out is tried first.
-- KEYS[1] delayed
-- KEYS[2] stream
-- ARGV[1] cap    stop when the stream holds this many; 0 = never
-- ARGV[2] trim   MAXLEN ~ of each XADD; 0 = none
-- ARGV[3...] members
-- returns a list, a member each: 1 moved, 0 not there or no job, -1 left where it is because the stream is full
local delayed, stream = KEYS[1], KEYS[2]
local cap, trim = tonumber(ARGV[1]), ARGV[2]
for key, wanted in pairs({ [delayed] = 'zset', [stream] = 'stream' }) do
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
redis.call('ZREM', delayed, 'no member')
local length = redis.call('XLEN', stream)
local moved = {}
for i = 3, #ARGV do
  local member = ARGV[i]
  local size = #member >= 4 and struct.unpack('<I4', member) or nil
  if cap > 0 and length >= cap then
    moved[#moved + 1] = -1
  elseif not size or 4 + size > #member or not redis.call('ZSCORE', delayed, member) then
    moved[#moved + 1] = 0
  else
    local args = { 'XADD', stream, '*', 'd', string.sub(member, 5 + size) }
    if trim ~= '0' then args = { 'XADD', stream, 'MAXLEN', '~', trim, '*', 'd', string.sub(member, 5 + size) } end
    if size > 0 then
      args[#args + 1] = 'n'
      args[#args + 1] = string.sub(member, 5, 4 + size)
    end
    redis.call(unpack(args))
    redis.call('ZREM', delayed, member)
    length = length + 1
    moved[#moved + 1] = 1
  end
end
return moved
