-- Gives a block of a batch back that was not run: any worker may take its jobs at once, and no attempt is burned.
-- Race: the checkpoint was started again meanwhile: then the token is old, and the new driver keeps its jobs. The batch
-- is marked first, so a driver that runs it again reads nothing from it, however far this came.
-- KEYS[1] session
-- KEYS[2] batch
-- KEYS[3] stream
-- ARGV[1] token
-- ARGV[2] group
-- ARGV[3] consumer
-- ARGV[4] block
-- ARGV[5] idle_ms   the idle time they get: the threshold of those who look for stale jobs
-- ARGV[6] state     what the batch is marked with
-- ARGV[7] narrow    from now on batches of at most so many, until as many jobs were taken; 0: as before
-- returns -1 the token is old; else how many were released
local session, batch, stream, token, group, consumer = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3]
local block, idle_ms, state, narrow = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local call = redis.call
if call('HGET', session, 'token') ~= token then return -1 end
if call('EXISTS', batch) == 0 then return 0 end
local held = call('HMGET', batch, 'state', 'count', 'b' .. block)
if not held[1] then
  call('HSET', batch, 'state', state)
  if narrow > 0 then
    call('HSET', session, 'narrow_limit', narrow)
    call('HINCRBY', session, 'narrow_left', held[2])
  end
end
local released = 0
for id, before in string.gmatch(held[3] or '', '(%d+%-%d+):?(%d*)') do
  if #call('XPENDING', stream, group, id, id, 1, consumer) == 1 then
    if before == '' then before = '0' end
    call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', idle_ms, 'RETRYCOUNT', before, 'JUSTID')
    released = released + 1
  end
end
call('HDEL', batch, 'b' .. block)
return released
