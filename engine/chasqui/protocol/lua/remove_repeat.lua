-- Removes a repeat spec, and its bytes even where nothing points to them any more.
-- Race: remove against fire. Both run here one after the other; a plan made before finds no spec, and does nothing.
-- KEYS[1] repeat
-- KEYS[2] spec   the hash
-- ARGV[1] key    the spec's
-- returns 1 removed; 0 there was none
local repeats, spec, key = KEYS[1], KEYS[2], ARGV[1]
local removed = redis.call('ZREM', repeats, key)
redis.call('DEL', spec)
return removed
