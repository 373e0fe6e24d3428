-- Closes a batch: from now on it holds what it holds. One without jobs is removed.
-- Race: a driver that was replaced must not close what the next one is filling: an old token changes nothing.
-- KEYS[1] session
-- KEYS[2] batch
-- ARGV[1] token
-- returns -1 the token is old; else how many jobs it holds
local session, batch, token = KEYS[1], KEYS[2], ARGV[1]
if redis.call('HGET', session, 'token') ~= token then return -1 end
local held = redis.call('HMGET', batch, 'count', 'sealed')
local count = tonumber(held[1] or '0')
if count == 0 and not held[2] then
  redis.call('DEL', batch)
  return 0
end
if not held[2] then
  redis.call('HSET', batch, 'sealed', 1)
  if tonumber(redis.call('HGET', session, 'narrow_left') or '0') > 0 then
    if redis.call('HINCRBY', session, 'narrow_left', -count) <= 0 then
      redis.call('HDEL', session, 'narrow_left', 'narrow_limit')
    end
  end
end
return count
