-- Moves the next jobs of a version from its stages to the stream, the delayed set and the dead letters, and the ledger's
-- cursor with them.
-- Race: two drivers publish one version, or one lost the reply: what is moved is decided by the ledger's cursor alone, so
-- each call moves the next jobs and none twice. A driver of an older version, or of another manifest, moves nothing.
-- A write that fails half way (it cannot, after the checks, but for the server's own limits) leaves the cursor behind
-- the last job that is in. A stage that is gone, or has not the blocks it must have, is an error and never the end.
-- Words: moved | done (all stages) | full | elsewhere (the cursor is at another stage) | unique (the block has ids: see
-- publish_unique_slice) | foreign (the ledger has another version or manifest, or is not open) | lost (the stage).
-- A version that is done is done whatever the manifest: what is in must not go in again.
-- KEYS[1] ledger
-- KEYS[2] stage     the one at the cursor, as the caller believes
-- KEYS[3] stream
-- KEYS[4] delayed
-- KEYS[5] dlq
-- ARGV[1] version
-- ARGV[2] id        of the manifest
-- ARGV[3] place     of that stage in the manifest, from 0
-- ARGV[4] blocks    that it has had
-- ARGV[5] limit     most jobs to move
-- ARGV[6] cap       move no more than fit under this many in the stream; 0 = any
-- ARGV[7] trim      MAXLEN ~ of each XADD to the stream; 0 = none
-- ARGV[8] dlq_len   MAXLEN ~ of the dead letters
-- returns {word, place of the stage at the cursor, jobs published so far, us it took}; after unique also block and job
local ledger, stage, stream, delayed, dlq = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local version, id, place, blocks = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local limit, cap, trim, dlq_len = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8]
local call, try = redis.call, redis.pcall
-- In some servers TIME stands still while a script runs, and others have no os.clock.
local has_clock, clock = pcall(function() return os.clock end)
local function seconds()
  if has_clock then return clock() end
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local started = seconds()
for key, wanted in pairs({ [stage] = 'hash', [stream] = 'stream', [delayed] = 'zset', [dlq] = 'stream' }) do
  local found = call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
local row = call('HMGET', ledger, 'version', 'manifest', 'state', 'stages', 'stage', 'block', 'job', 'published')
if row[1] ~= version then return { 'foreign', 0, 0, 0 } end
local stages, at, block, job, published = tonumber(row[4]), tonumber(row[5]), row[6], tonumber(row[7]), tonumber(row[8])
if row[3] == 'done' then return { 'done', at, published, 0 } end
if row[2] ~= id or row[3] ~= 'open' then return { 'foreign', 0, 0, 0 } end
if at ~= place then return { 'elsewhere', at, published, 0 } end
local packed = call('HGET', stage, block)
if not packed or call('HLEN', stage) ~= blocks - tonumber(block) then return { 'lost', at, published, 0 } end
local jobs = cmsgpack.unpack(packed)
-- What each kind of block holds after its head, see protocol/blocks.py.
local kind, head, width = jobs[1], 1, 2
if kind == 'same' then head, width = 2, 1
elseif kind == 'unique' then return { 'unique', at, published, 0, tonumber(block), job }
elseif kind == 'dead' then width = 4
elseif kind ~= 'named' and kind ~= 'later' then return { 'lost', at, published, 0 } end
local count = (#jobs - head) / width
local last = math.min(count, job + limit)
if cap > 0 and (kind == 'same' or kind == 'named') then
  last = math.min(last, job + cap - call('XLEN', stream))
  if last <= job then return { 'full', at, published, 0 } end
end
local failed
for n = job, last - 1 do
  local i = head + n * width + 1
  local reply
  if kind == 'later' then reply = try('ZADD', delayed, jobs[i], jobs[i + 1])
  elseif kind == 'dead' then
    if jobs[i + 1] == '' then
      reply = try('XADD', dlq, 'MAXLEN', '~', dlq_len, '*', 'd', jobs[i], 'source_id', '', 'reason', jobs[i + 2],
        'detail', jobs[i + 3])
    else
      reply = try('XADD', dlq, 'MAXLEN', '~', dlq_len, '*', 'd', jobs[i], 'n', jobs[i + 1], 'source_id', '', 'reason',
        jobs[i + 2], 'detail', jobs[i + 3])
    end
  else
    local name, envelope = jobs[2], jobs[i]
    if kind == 'named' then name, envelope = jobs[i], jobs[i + 1] end
    if trim ~= '0' then
      if name == '' then reply = try('XADD', stream, 'MAXLEN', '~', trim, '*', 'd', envelope)
      else reply = try('XADD', stream, 'MAXLEN', '~', trim, '*', 'd', envelope, 'n', name) end
    elseif name == '' then reply = try('XADD', stream, '*', 'd', envelope)
    else reply = try('XADD', stream, '*', 'd', envelope, 'n', name) end
  end
  if type(reply) == 'table' and reply.err then
    failed, last = reply, n
    break
  end
end
published = published + last - job
job = last
if job == count then
  call('HDEL', stage, block)
  block, job = tonumber(block) + 1, 0
  if block == blocks then at, block = at + 1, 0 end
end
local state = at == stages and 'done' or 'open'
call('HSET', ledger, 'state', state, 'stage', at, 'block', block, 'job', job, 'published', published,
  'changed', call('TIME')[1])
if failed then return failed end
local took = math.floor((seconds() - started) * 1000000)
return { state == 'done' and 'done' or 'moved', at, published, took }
