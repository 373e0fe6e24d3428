-- Notes that a task begins to read jobs of a batch, or is still at work on them: from now on they may be run, and Spark
-- may commit them.
-- Race: a task that comes late, when the batch was settled or given back, or when another driver has it, reads nothing: a
-- batch that is not there is not made anew, and one that was given back is not begun any more.
-- KEYS[1] session
-- KEYS[2] batch
-- ARGV[1] token   of the driver that has planned the task
-- ARGV[2] run     Spark's name for the run
-- ARGV[3] task    a name of its own
-- returns 1 noted; 0 there is nothing to read; -1 the token is old
local session, batch, token, run, task = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
if call('EXISTS', batch) == 0 or call('HEXISTS', batch, 'state') == 1 then return 0 end
if call('HGET', session, 'token') ~= token then return -1 end
local time = call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
call('HSET', batch, 'run', run, 'beat:' .. token, now)
if call('HSETNX', batch, 'task:' .. token .. ':' .. task, 1) == 1 then call('HINCRBY', batch, 'tasks:' .. token, 1) end
return 1
