-- Fires a due repeat spec and moves it to its next fire; removes it when there is none, or its limit is reached.
-- Race: two leaders, a leader that slept past its lease, a call sent again after a lost reply, an upsert or a removal
-- since the plan was made: it acts only while we hold the lease and the spec stands, with the same score and the same
-- bytes, as it was planned from. Firing changes the score in the same step, so each plan is carried out once.
-- At the cap the spec stays as it is, to be tried again. That its score can be set is tried first: were that refused after
-- the jobs are added, they would be added again and again.
-- KEYS[1] lock
-- KEYS[2] repeat
-- KEYS[3] spec      the hash
-- KEYS[4] stream
-- ARGV[1] holder
-- ARGV[2] key       the spec's
-- ARGV[3] score     as it was read
-- ARGV[4] sha       SHA-1, in hex, of the stored bytes that were read
-- ARGV[5] cap       hold when the stream has so many; 0 = never
-- ARGV[6] trim      MAXLEN ~ of each XADD; 0 = none
-- ARGV[7] limit     fires in the spec's whole life; 0 = no limit
-- ARGV[8] next      when it fires next, epoch ms; 0 = never
-- ARGV[9] catchup   "" or what is left of a catch-up that goes on, as <next>,<fires left>
-- ARGV[10] name     may be empty
-- ARGV[11...] envelopes, a fire each
-- returns {jobs fired, 1 if the spec was removed else 0}; 0 not as planned from; -1 full; -2 another leads
local lock, repeats, spec, stream = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, key, score, sha = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local cap, trim, limit, next_ms = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), ARGV[8]
local catchup, name = ARGV[9], ARGV[10]
local call = redis.call
if call('GET', lock) ~= holder then return -2 end
if call('ZSCORE', repeats, key) ~= score then return 0 end
local stored = call('HGET', spec, 'spec')
if not stored or redis.sha1hex(stored) ~= sha then return 0 end
local found = call('TYPE', stream).ok
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. stream .. ' holds a ' .. found)
end
local count = #ARGV - 10
if count > 0 and cap > 0 and call('XLEN', stream) >= cap then return -1 end
-- Not HINCRBY: a count that is no number would make it fail after the jobs are added.
local fired = tonumber(string.match(call('HGET', spec, 'fired') or '', '^%d+$')) or 0
if limit > 0 then count = math.min(count, math.max(0, limit - fired)) end
call('ZADD', repeats, 'XX', score, key)
local entry = { 'XADD', stream, '*', 'd', '' }
if trim ~= '0' then entry = { 'XADD', stream, 'MAXLEN', '~', trim, '*', 'd', '' } end
local place = #entry
if name ~= '' then
  entry[place + 1] = 'n'
  entry[place + 2] = name
end
for i = 11, 10 + count do
  entry[place] = ARGV[i]
  call(unpack(entry))
end
fired = fired + count
if next_ms == '0' or (limit > 0 and fired >= limit) then
  call('ZREM', repeats, key)
  call('DEL', spec)
  return { count, 1 }
end
-- The score first: should one of these be refused, this fire must not come a second time.
call('ZADD', repeats, next_ms, key)
if count > 0 then call('HSET', spec, 'fired', string.format('%.0f', fired)) end
if catchup == '' then call('HDEL', spec, 'catchup') else call('HSET', spec, 'catchup', catchup) end
return { count, 0 }
