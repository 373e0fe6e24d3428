-- Takes the lease of a Spark checkpoint on a queue, with a new fencing token.
-- Race: two drivers of one checkpoint, or one that was thought dead: whoever has the latest token acts, every other script
-- refuses older ones. Asked again by the same process (its reply was lost) it answers the same.
-- KEYS[1] session
-- ARGV[1] holder    this process
-- ARGV[2] ttl_ms    how long it holds without renewal
-- ARGV[3] keep_ms   how long the key outlives its driver
-- ARGV[4] label     for people
-- ARGV[5] terms     how its jobs are settled, for those who settle in its place
-- returns {1, token} it is ours; {0, token, ms it still holds, until} another has it
local session, holder, ttl_ms, keep_ms, label, terms = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local found = redis.call('HMGET', session, 'token', 'until', 'holder')
local token, till = tonumber(found[1] or '0'), tonumber(found[2] or '0')
if till > now and found[3] ~= holder then return { 0, token, till - now, found[2] } end
if found[3] ~= holder then token = redis.call('HINCRBY', session, 'token', 1) end
redis.call('HSET', session, 'until', string.format('%.0f', now + tonumber(ttl_ms)), 'holder', holder, 'label', label,
  'terms', terms)
redis.call('PEXPIRE', session, keep_ms)
return { 1, token }
