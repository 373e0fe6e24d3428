-- Renews a worker's claims on the jobs it holds, and tells which it has lost.
-- Race: a claim may have gone stale and been taken over: a bare XCLAIM would steal it back, so only entries that are
-- still pending for this worker are renewed. Delivery counts stay.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3...] entry ids
-- returns the ids that are no longer ours
local stream, group, consumer, first = KEYS[1], ARGV[1], ARGV[2], 3
local call = redis.call
if #ARGV < first then return {} end
-- Jobs that were taken together stand side by side, so one look finds most of them; the others are looked for one by one.
local held, lost, ours = {}, {}, { 'XCLAIM', stream, group, consumer, 0 }
for _, pending in ipairs(call('XPENDING', stream, group, ARGV[first], ARGV[#ARGV], #ARGV - first + 1, consumer)) do
  held[pending[1]] = true
end
for i = first, #ARGV do
  local id = ARGV[i]
  if held[id] or #call('XPENDING', stream, group, id, id, 1, consumer) == 1 then
    ours[#ours + 1] = id
  else
    lost[#lost + 1] = id
  end
end
if #ours > 5 then
  ours[#ours + 1] = 'JUSTID'
  call(unpack(ours))
end
return lost
