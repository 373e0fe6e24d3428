-- Renews a driver's lease, or gives it back.
-- Race: another driver has taken it since: then the token is old, and nothing changes.
-- KEYS[1] session
-- KEYS[2...] batches in flight, whose keys live on as well
-- ARGV[1] token
-- ARGV[2] ttl_ms    0: give it back
-- ARGV[3] keep_ms   how long the keys outlive their driver
-- returns 1 it is ours; 0 another has it
local session, token, ttl_ms, keep_ms = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
if redis.call('HGET', session, 'token') ~= token then return 0 end
local till = '0'
if ttl_ms > 0 then
  local time = redis.call('TIME')
  till = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + ttl_ms)
end
redis.call('HSET', session, 'until', till)
for i = 1, #KEYS do redis.call('PEXPIRE', KEYS[i], keep_ms) end
return 1
