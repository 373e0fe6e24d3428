-- Moves dead letters back to the stream.
-- Race: two replays of the same entry, or one whose reply was lost: only an entry that is there adds the job, and it is
-- removed in the same step, after the add: a write that is refused leaves it where it is. As in retry_later what takes
-- out is tried first.
-- KEYS[1] dlq
-- KEYS[2] stream
-- ARGV[1] cap    stop when the stream holds this many; 0 = never
-- ARGV[2] trim   MAXLEN ~ of each XADD; 0 = none
-- ARGV[3...] three per entry: dlq id, envelope, name
-- returns {entries moved, 1 if the cap stopped it else 0}
local dlq, stream = KEYS[1], KEYS[2]
local cap, trim = tonumber(ARGV[1]), ARGV[2]
for _, key in ipairs(KEYS) do
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= 'stream' then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
redis.call('XDEL', dlq, '0-0')
local length = redis.call('XLEN', stream)
local moved = 0
for i = 3, #ARGV, 3 do
  if cap > 0 and length + moved >= cap then return { moved, 1 } end
  if #redis.call('XRANGE', dlq, ARGV[i], ARGV[i]) == 1 then
    local args = { 'XADD', stream, '*', 'd', ARGV[i + 1] }
    if trim ~= '0' then args = { 'XADD', stream, 'MAXLEN', '~', trim, '*', 'd', ARGV[i + 1] } end
    if ARGV[i + 2] ~= '' then
      args[#args + 1] = 'n'
      args[#args + 1] = ARGV[i + 2]
    end
    redis.call(unpack(args))
    redis.call('XDEL', dlq, ARGV[i])
    moved = moved + 1
  end
end
return { moved, 0 }
