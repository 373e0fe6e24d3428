-- Counts that a driver sets out to run a batch, once per driver process, and only when tasks have begun the run before.
-- Race: asked again after a lost reply, or for a second plan of one run, it does not count again. Tasks of the driver before
-- may be at work still, after a quick restart: then this one has to wait. They tell that they live with a token that is old
-- by now, so that it need not wait for long.
-- KEYS[1] session
-- KEYS[2] batch
-- ARGV[1] token
-- ARGV[2] holder     this process
-- ARGV[3] silent_ms  tasks that were not heard of for so long are dead
-- returns {-1} old token; {0} no such batch; {2, ms} not before; else {1, runs so far, jobs, blocks, state, 1 if new here}
local session, batch, token, holder, silent_ms = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3])
local call = redis.call
local place = call('HMGET', session, 'token', 'busy_until')
if place[1] ~= token then return { -1 } end
if call('EXISTS', batch) == 0 then return { 0 } end
local held = call('HMGET', batch, 'planned_by', 'runs', 'count', 'blocks', 'state', 'run', 'planned_for')
local function number(text) return tonumber(text or '0') or 0 end
local runs, new = number(held[2]), 0
if held[1] ~= holder then
  new = 1
  local before, till = held[7] or '', held[6] and number(place[2]) or 0
  local at_work = call('HMGET', batch, 'tasks:' .. before, 'beat:' .. before)
  if number(at_work[1]) > 0 then till = math.max(till, number(at_work[2]) + silent_ms) end
  local time = call('TIME')
  local left = till - (tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  if left > 0 and left <= 60000 then return { 2, left } end
  if runs == 0 or held[6] then runs = call('HINCRBY', batch, 'runs', 1) end
  call('HSET', batch, 'planned_by', holder, 'planned_for', token)
  call('HDEL', batch, 'run')
end
return { 1, runs, number(held[3]), number(held[4]), held[5] or '', new }
