-- Takes or renews a leader's lease.
-- Race: two candidates, or a leader that slept past its lease: whoever holds the key leads, the other learns it here.
-- KEYS[1] lock
-- ARGV[1] holder
-- ARGV[2] ttl_ms
-- returns 1 we lead; 0 another does
local lock, holder, ttl_ms = KEYS[1], ARGV[1], ARGV[2]
local current = redis.call('GET', lock)
if current and current ~= holder then return 0 end
redis.call('SET', lock, holder, 'PX', ttl_ms)
return 1
