-- Lists the repeat specs that are due, and tells the time by which they are: that of the server which has the queue.
-- KEYS[1] repeat
-- ARGV[1] batch   most specs to list
-- returns {now in epoch ms, {key, score, key, score...}}
local repeats, batch = KEYS[1], ARGV[1]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local due = redis.call('ZRANGEBYSCORE', repeats, '-inf', string.format('%.0f', now), 'WITHSCORES', 'LIMIT', 0, batch)
return { now, due }
