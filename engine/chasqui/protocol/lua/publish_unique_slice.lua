-- Moves the next jobs of a block whose jobs have ids, each id once while its marker lives, and the ledger's cursor with
-- them. A job whose id is taken is passed over, as an add with that id would be.
-- Race: as in publish_slice: the cursor decides. The caller has read the block, which never changes, to name its keys;
-- when the cursor has left it meanwhile, nothing is moved. Words as in publish_slice.
-- KEYS[1] ledger
-- KEYS[2] stage
-- KEYS[3] stream
-- KEYS[4] delayed
-- KEYS[5...] two per job, from job `first` of the block on: dedup marker, index of delayed members
-- ARGV[1] version
-- ARGV[2] id       of the manifest
-- ARGV[3] place    of the stage in the manifest, from 0
-- ARGV[4] blocks   that it has had
-- ARGV[5] block    where the cursor is, as the caller believes
-- ARGV[6] first    job at the cursor, likewise
-- ARGV[7] cap      move no more than fit under this many in the stream; 0 = any
-- ARGV[8] trim     MAXLEN ~ of each XADD to the stream; 0 = none
-- returns {word, place of the stage at the cursor, jobs published or passed over so far, us it took}
local ledger, stage, stream, delayed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local version, id, place, blocks = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local block, first, cap, trim = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local call, try = redis.call, redis.pcall
-- In some servers TIME stands still while a script runs, and others have no os.clock.
local has_clock, clock = pcall(function() return os.clock end)
local function seconds()
  if has_clock then return clock() end
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local started = seconds()
for key, wanted in pairs({ [stage] = 'hash', [stream] = 'stream', [delayed] = 'zset' }) do
  local found = call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
local row = call('HMGET', ledger, 'version', 'manifest', 'state', 'stages', 'stage', 'block', 'job', 'published')
if row[1] ~= version then return { 'foreign', 0, 0, 0 } end
local stages, at, published = tonumber(row[4]), tonumber(row[5]), tonumber(row[8])
if row[3] == 'done' then return { 'done', at, published, 0 } end
if row[2] ~= id or row[3] ~= 'open' then return { 'foreign', 0, 0, 0 } end
if at ~= place or row[6] ~= block or tonumber(row[7]) ~= first then return { 'elsewhere', at, published, 0 } end
local packed = call('HGET', stage, block)
if not packed or call('HLEN', stage) ~= blocks - tonumber(block) then return { 'lost', at, published, 0 } end
local jobs = cmsgpack.unpack(packed)
local count = (#jobs - 1) / 5
local room = cap > 0 and cap - call('XLEN', stream) or math.huge
local failed
local job = first
for k = 5, #KEYS, 2 do
  local i = 2 + job * 5
  local run_at, ttl, bytes, name = jobs[i + 1], jobs[i + 2], jobs[i + 3], jobs[i + 4]
  -- The marker is set after the add: should the add fail, the id is still free for the next try.
  if ttl == '0' or call('EXISTS', KEYS[k]) == 0 then
    local reply
    if run_at ~= '' then
      reply = try('ZADD', delayed, run_at, bytes)
    else
      if room <= 0 then break end
      room = room - 1
      local args = { 'XADD', stream, '*', 'd', bytes }
      if trim ~= '0' then args = { 'XADD', stream, 'MAXLEN', '~', trim, '*', 'd', bytes } end
      if name ~= '' then
        args[#args + 1] = 'n'
        args[#args + 1] = name
      end
      reply = try(unpack(args))
    end
    if type(reply) == 'table' and reply.err then
      failed = reply
      break
    end
    if ttl ~= '0' then
      call('SET', KEYS[k], '1', 'EX', ttl)
      if run_at ~= '' then call('SET', KEYS[k + 1], bytes, 'EX', ttl) end
    end
  end
  job = job + 1
end
if job == first and not failed then return { 'full', at, published, 0 } end
published = published + job - first
local next_block = tonumber(block)
if job == count then
  call('HDEL', stage, block)
  next_block, job = next_block + 1, 0
  if next_block == blocks then at, next_block = at + 1, 0 end
end
local state = at == stages and 'done' or 'open'
call('HSET', ledger, 'state', state, 'stage', at, 'block', next_block, 'job', job, 'published', published,
  'changed', call('TIME')[1])
if failed then return failed end
local took = math.floor((seconds() - started) * 1000000)
return { state == 'done' and 'done' or 'moved', at, published, took }
