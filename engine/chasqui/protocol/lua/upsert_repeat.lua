-- Stores a repeat spec, or overwrites it, and sets its next fire anew. How often it has fired so far stays.
-- Race: upsert against a scheduler at work on the same spec. Both run here one after the other; a plan made from what
-- is overwritten finds another score or other bytes, and does nothing.
-- KEYS[1] repeat
-- KEYS[2] spec      the hash
-- ARGV[1] score     the first fire, epoch ms
-- ARGV[2] key       the spec's
-- ARGV[3] stored    the spec's bytes
-- ARGV[4] dst       what to do when clocks change, as <gap>,<overlap>; "" = as usual
-- returns 1
local repeats, spec = KEYS[1], KEYS[2]
local score, key, stored, dst = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
for name, wanted in pairs({ [repeats] = 'zset', [spec] = 'hash' }) do
  local found = redis.call('TYPE', name).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. name .. ' holds a ' .. found)
  end
end
redis.call('HSET', spec, 'spec', stored)
redis.call('HDEL', spec, 'catchup')
if dst == '' then redis.call('HDEL', spec, 'dst') else redis.call('HSET', spec, 'dst', dst) end
redis.call('ZADD', repeats, score, key)
return 1
