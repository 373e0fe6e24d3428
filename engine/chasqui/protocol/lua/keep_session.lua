-- Renews a driver's lease, or gives it back.
-- Race: another driver has taken it since: then the token is old, and nothing changes.
-- KEYS[1] session
-- KEYS[2...] batches in flight, whose keys live on as well
-- ARGV[1] token
-- ARGV[2] ttl_ms    0: give it back
-- ARGV[3] keep_ms   how long the keys outlive their driver
-- ARGV[4] linger_ms for so long jobs that its tasks have read may be at work still, when it is given back
-- returns 1 it is ours; 0 another has it
local session, token, ttl_ms, keep_ms, linger_ms = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
if redis.call('HGET', session, 'token') ~= token then return 0 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ttl_ms > 0 then
  redis.call('HSET', session, 'until', string.format('%.0f', now + ttl_ms))
else
  redis.call('HSET', session, 'until', '0', 'busy_until', string.format('%.0f', now + linger_ms))
end
for i = 1, #KEYS do redis.call('PEXPIRE', KEYS[i], keep_ms) end
return 1
