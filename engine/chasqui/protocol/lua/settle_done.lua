-- Ends jobs that are done, each only while it is pending for a consumer whose name starts with the prefix, and stores what
-- they returned.
-- Race: the outcome comes a second time, or late, when a worker of another kind has the job: then nothing happens.
-- A result that cannot be stored (out of memory) does not bring the job back.
-- KEYS[1] stream
-- KEYS[2...] result keys, of the jobs that have a result
-- ARGV[1] group
-- ARGV[2] prefix
-- ARGV[3] ttl_s
-- ARGV[4...] three per job: entry id, the place of its key among KEYS or 0, result
-- returns a list, a job each: 1 ended here, 0 not a Spark consumer's any more
local stream, group, prefix, ttl_s = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local ended, ours = {}, {}
for i = 4, #ARGV, 3 do
  local id, place = ARGV[i], tonumber(ARGV[i + 1])
  local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
  local mine = pending and string.sub(pending[2], 1, #prefix) == prefix
  if mine then
    ours[#ours + 1] = id
    if place > 0 then redis.pcall('SET', KEYS[place], ARGV[i + 2], 'EX', ttl_s) end
  end
  ended[#ended + 1] = mine and 1 or 0
end
if #ours > 0 then
  redis.call('XACK', stream, group, unpack(ours))
  redis.call('XDEL', stream, unpack(ours))
end
return ended
