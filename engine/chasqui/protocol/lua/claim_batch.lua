-- Takes jobs for a Spark driver and writes them down as the next block of a batch, in one step.
-- Race: killed after it, the jobs stand in the batch, and the driver that comes next finds them. Sent again after a lost
-- reply it takes no more than the batch may still hold. An old token takes nothing.
-- A block is text: entry ids, blanks between them, each with ":n" where it was delivered n times before.
-- KEYS[1] session
-- KEYS[2] batch
-- KEYS[3] stream
-- KEYS[4] paused      while this key exists nothing is taken
-- ARGV[1] token
-- ARGV[2] group
-- ARGV[3] consumer
-- ARGV[4] limit       most jobs of the whole batch
-- ARGV[5] slice       most jobs of this call
-- ARGV[6] min_idle_ms jobs of workers silent for so long; 0: new jobs
-- ARGV[7] upto        no new job after this entry id; empty: any
-- ARGV[8] keep_ms     how long the batch outlives its driver
-- ARGV[9] room        this call takes no more jobs when so many bytes are full
-- returns {-1} the token is old; else {taken now, jobs in the batch, bytes in it, 1 if narrowed else 0}
local session, batch, stream, paused = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, group, consumer, limit, slice = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local min_idle_ms, upto, keep_ms, room = tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])
local call = redis.call
local place = call('HMGET', session, 'token', 'narrow_limit', 'narrow_left')
if place[1] ~= token then return { -1 } end
local held = call('HMGET', batch, 'count', 'bytes', 'sealed')
local count, bytes = tonumber(held[1] or '0'), tonumber(held[2] or '0')
local narrowed = 0
if tonumber(place[3] or '0') > 0 then
  limit = math.min(limit, tonumber(place[2]))
  narrowed = 1
end
local want = math.min(slice, limit - count)
if held[3] or want < 1 or call('EXISTS', paused) == 1 then return { 0, count, bytes, narrowed } end

local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end

local function later(a, b)
  local am, as = string.match(a, '^(%d+)-(%d+)$')
  local bm, bs = string.match(b, '^(%d+)-(%d+)$')
  if am == bm then am, bm = as, bs end
  if #am ~= #bm then return #am > #bm end
  return am > bm
end

local items, size = {}, 0
local function add(item, values)
  items[#items + 1] = item
  for k = 2, #values, 2 do size = size + #values[k] end
end

if min_idle_ms > 0 then
  for _, pending in ipairs(call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', want)) do
    local id, before = pending[1], pending[4]
    local entry = call('XCLAIM', stream, group, consumer, min_idle_ms, id, 'RETRYCOUNT', before + 1)[1]
    if entry then
      add(id .. ':' .. before, entry[2])
    elseif entry == false then
      call('XACK', stream, group, id) -- its record is gone; servers since 7.0 forget it by themselves
    end
    if size >= room then break end
  end
else
  local last
  if upto ~= '' and later(field(call('XINFO', 'STREAM', stream), 'last-generated-id'), upto) then
    for _, info in ipairs(call('XINFO', 'GROUPS', stream)) do
      if field(info, 'name') == group then last = field(info, 'last-delivered-id') end
    end
  end
  -- A few at a time, however small the first ones are: the next may hold a megabyte each.
  local chunk = math.min(want, 10)
  while chunk > 0 do
    if last then chunk = #call('XRANGE', stream, '(' .. last, upto, 'COUNT', chunk) end
    local reply = chunk > 0 and call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', chunk, 'STREAMS', stream, '>')
    if not reply then break end
    local entries = reply[1][2]
    for i = 1, #entries do add(entries[i][1], entries[i][2]) end
    if #entries < chunk or size >= room then break end
    last = last and entries[#entries][1]
    chunk = math.min(100, want - #items, math.max(1, math.floor((room - size) * #items / math.max(size, 1))))
  end
end
if #items > 0 then
  local number = call('HINCRBY', batch, 'blocks', 1)
  call('HSET', batch, 'b' .. number, table.concat(items, ' '))
  call('HINCRBY', batch, 'left', 1)
  count = call('HINCRBY', batch, 'count', #items)
  bytes = call('HINCRBY', batch, 'bytes', size)
  call('PEXPIRE', batch, keep_ms)
end
return { #items, count, bytes, narrowed }
