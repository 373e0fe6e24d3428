-- Renews a worker's claims on the jobs it holds, and tells which it has lost.
-- Race: a claim may have gone stale and been taken over: a bare XCLAIM would steal it back, so only entries that are
-- still pending for this worker are renewed. Delivery counts stay.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3...] entry ids
-- returns the ids that are no longer ours
local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV do
  if #redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1, consumer) == 1 then
    redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
