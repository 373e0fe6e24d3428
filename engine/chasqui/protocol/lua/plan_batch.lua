-- Counts that a driver sets out to run a batch, once per driver process.
-- Race: asked again after a lost reply, or for a second plan of one run, it does not count again.
-- KEYS[1] session
-- KEYS[2] batch
-- ARGV[1] token
-- ARGV[2] holder   this process
-- returns {-1} the token is old; {0} there is no such batch; else {1, runs so far, jobs in it, blocks, state, 1 if new here}
local session, batch, token, holder = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
if redis.call('HGET', session, 'token') ~= token then return { -1 } end
if redis.call('EXISTS', batch) == 0 then return { 0 } end
local held = redis.call('HMGET', batch, 'planned_by', 'runs', 'count', 'blocks', 'state')
local runs, new = tonumber(held[2] or '0'), 0
if held[1] ~= holder then
  new = 1
  runs = redis.call('HINCRBY', batch, 'runs', 1)
  redis.call('HSET', batch, 'planned_by', holder)
  redis.call('HDEL', batch, 'run')
end
return { 1, runs, tonumber(held[3] or '0'), tonumber(held[4] or '0'), held[5] or '', new }
