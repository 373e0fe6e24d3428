-- Books the next turn of a shared pace, and tells how long to wait for it.
-- Race: any number of tasks book at the same time: each gets a turn behind those before it. A turn that is booked twice,
-- after a lost reply, only makes the whole slower.
-- KEYS[1] pace
-- ARGV[1] per_second
-- ARGV[2] count       how many are done in this turn
-- returns ms to wait before the turn
local pace, per_second, count = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + tonumber(time[2]) / 1000
local turn = math.max(now, tonumber(redis.call('GET', pace) or '0'))
local after = turn + count * 1000 / per_second
redis.call('SET', pace, string.format('%.3f', after), 'PX', math.ceil(after - now) + 60000)
return math.ceil(turn - now)
