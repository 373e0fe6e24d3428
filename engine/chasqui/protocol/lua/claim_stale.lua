-- Takes over jobs whose worker has not renewed its claim for min_idle_ms.
-- Race: two workers look at the same time: XCLAIM checks the idle time again and resets it, so one gets each job.
-- A pending entry whose record is gone is dropped: there is nothing left to run.
-- The server walks all that is pending to find what is idle, so of very much a part is looked at: a stretch of time in
-- which about 10,000 were added. The next call goes on behind it.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3] min_idle_ms
-- ARGV[4] count      most entries taken; fewer when they hold more than a megabyte
-- ARGV[5] from       where to look, if only a part is looked at: the milliseconds of an entry id; 0 = the beginning
-- returns {list of {entry id, fields, deliveries before}, ms until the next one may be stale or -1, the next from}
local stream, group, consumer, min_idle_ms, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local from = tonumber(ARGV[5])
local call = redis.call
local function ms(id) return tonumber(string.match(id, '^%d+')) end
local summary = call('XPENDING', stream, group)
local parts = math.ceil(summary[1] / 10000)
local first, last, next_from = '-', '+', 0
if parts > 1 and ms(summary[3]) < 9007199254740992 then
  local least, most = ms(summary[2]), ms(summary[3])
  if from < least or from > most then from = least end
  local upto = from + math.ceil((most - least + 1) / parts) - 1
  first, last = string.format('%.0f', from), string.format('%.0f', upto)
  next_from = upto < most and upto + 1 or least
end
local taken, size = {}, 0
for _, pending in ipairs(call('XPENDING', stream, group, 'IDLE', min_idle_ms, first, last, count)) do
  local id = pending[1]
  local entry = call('XCLAIM', stream, group, consumer, min_idle_ms, id)[1]
  if entry and entry[2] then
    taken[#taken + 1] = { id, entry[2], pending[4] }
    for _, value in ipairs(entry[2]) do size = size + #value end
    if size > 1048576 then break end
  elseif #call('XRANGE', stream, id, id) == 0 then
    call('XACK', stream, group, id)
  end
end
if next_from > 0 then
  if #taken > 0 then return { taken, 1, string.format('%.0f', from) } end  -- there may be more here
  return { taken, -1, string.format('%.0f', next_from) }
end
local wait = -1
for _, pending in ipairs(call('XPENDING', stream, group, '-', '+', 100)) do
  local left = math.max(1, min_idle_ms - pending[3])
  if pending[2] ~= consumer and (wait < 0 or left < wait) then wait = left end
end
return { taken, wait, 0 }
