-- Notes that a task reads no more, and that nothing of it is running.
-- Race: asked again after a lost reply it counts once; a batch that is gone is not made anew.
-- KEYS[1] batch
-- ARGV[1] token
-- ARGV[2] task
-- returns 1 noted; 0 it was not known
local batch, token, task = KEYS[1], ARGV[1], ARGV[2]
if redis.call('HDEL', batch, 'task:' .. token .. ':' .. task) == 0 then return 0 end
redis.call('HINCRBY', batch, 'tasks:' .. token, -1)
return 1
