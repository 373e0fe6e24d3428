-- Ends jobs that are done and stores what they returned; only the worker whose ack counted stores.
-- A result that cannot be stored (out of memory) does not bring the job back.
-- KEYS[1] stream
-- KEYS[2...] result keys
-- ARGV[1] group
-- ARGV[2] ttl_s
-- ARGV[3...] two per job: entry id, result
-- returns a list, a job each: 1 ended here, 0 was not pending any more
local stream, group, ttl_s = KEYS[1], ARGV[1], ARGV[2]
local done = {}
for i = 3, #ARGV, 2 do
  local acked = redis.call('XACK', stream, group, ARGV[i])
  if acked == 1 then
    redis.call('XDEL', stream, ARGV[i])
    redis.pcall('SET', KEYS[2 + (i - 3) / 2], ARGV[i + 1], 'EX', ttl_s)
  end
  done[#done + 1] = acked
end
return done
