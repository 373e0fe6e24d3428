-- Counts that a driver sets out to run a batch, once per driver process, and only when tasks have begun the run before.
-- Race: asked again after a lost reply, or for a second plan of one run, it does not count again.
-- KEYS[1] session
-- KEYS[2] batch
-- ARGV[1] token
-- ARGV[2] holder   this process
-- returns {-1} the token is old; {0} there is no such batch; else {1, runs so far, jobs in it, blocks, state, 1 if new here}
local session, batch, token, holder = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
if redis.call('HGET', session, 'token') ~= token then return { -1 } end
if redis.call('EXISTS', batch) == 0 then return { 0 } end
local held = redis.call('HMGET', batch, 'planned_by', 'runs', 'count', 'blocks', 'state', 'run')
local function number(text) return tonumber(text or '0') or 0 end
local runs, new = number(held[2]), 0
if held[1] ~= holder then
  new = 1
  if runs == 0 or held[6] then runs = redis.call('HINCRBY', batch, 'runs', 1) end
  redis.call('HSET', batch, 'planned_by', holder)
  redis.call('HDEL', batch, 'run')
end
return { 1, runs, number(held[3]), number(held[4]), held[5] or '', new }
