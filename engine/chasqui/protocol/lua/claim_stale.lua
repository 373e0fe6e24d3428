-- Takes over jobs whose worker has not renewed its claim for min_idle_ms.
-- Race: two workers look at the same time: XCLAIM checks the idle time again and resets it, so one gets each job.
-- A pending entry whose record is gone is dropped: there is nothing left to run.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3] min_idle_ms
-- ARGV[4] count      most entries taken; fewer when they hold more than a megabyte
-- returns {list of {entry id, fields, deliveries before}, ms until the next one may be stale or -1}
local stream, group, consumer, min_idle_ms, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local taken, size = {}, 0
for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', count)) do
  local id = pending[1]
  local entry = redis.call('XCLAIM', stream, group, consumer, min_idle_ms, id)[1]
  if entry and entry[2] then
    taken[#taken + 1] = { id, entry[2], pending[4] }
    for _, value in ipairs(entry[2]) do size = size + #value end
    if size > 1048576 then break end
  else
    redis.call('XACK', stream, group, id)
  end
end
local wait = -1
for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', 100)) do
  local left = math.max(1, min_idle_ms - pending[3])
  if pending[2] ~= consumer and (wait < 0 or left < wait) then wait = left end
end
return { taken, wait }
