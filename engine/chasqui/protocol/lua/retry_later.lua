-- Moves failed jobs from the stream to the delayed set, each only while it is still pending for this worker.
-- Race: the claim was lost to another worker, or the reply to a first call was lost: then it is not ours, and nothing
-- is written. The run-at time is counted on the server's clock, as the promoter does.
-- A job is added before it is taken out: a write that is refused leaves it where it is. What takes out is tried first,
-- on an entry that cannot be: were it refused after the add, each new try would add once more. It also counts as a
-- write, and a server without memory lets a script go on that has written.
-- KEYS[1] stream
-- KEYS[2] delayed
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3...] three per job: entry id, delay in ms, member
-- returns a list, a job each: 1 moved, 0 not ours
local stream, delayed, group, consumer = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local found = redis.call('TYPE', delayed).ok
if found ~= 'none' and found ~= 'zset' then
  return redis.error_reply('WRONGTYPE ' .. delayed .. ' holds a ' .. found)
end
redis.call('XACK', stream, group, '0-0')
redis.call('XDEL', stream, '0-0')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local moved = {}
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  if #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 1 then
    redis.call('ZADD', delayed, string.format('%.0f', now + tonumber(ARGV[i + 1])), ARGV[i + 2])
    redis.call('XACK', stream, group, id)
    redis.call('XDEL', stream, id)
    moved[#moved + 1] = 1
  else
    moved[#moved + 1] = 0
  end
end
return moved
