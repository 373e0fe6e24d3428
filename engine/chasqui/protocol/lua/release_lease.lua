-- Gives a lease back, unless another holds it by now.
-- KEYS[1] lock
-- ARGV[1] holder
-- returns 1 released; 0 it was not ours
local lock, holder = KEYS[1], ARGV[1]
if redis.call('GET', lock) ~= holder then return 0 end
redis.call('DEL', lock)
return 1
