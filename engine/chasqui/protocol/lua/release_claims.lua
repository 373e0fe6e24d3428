-- Gives jobs back that were taken but not started: any worker may take them at once, and no attempt is burned.
-- Race: as in renew_claims: only what is still pending for this worker is touched.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3] idle_ms    the idle time they get: the threshold of those who look for stale jobs
-- ARGV[4...] two per job: entry id, deliveries before it was given to us
-- returns how many were released
local stream, group, consumer, idle_ms = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local released = 0
for i = 4, #ARGV, 2 do
  if #redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1, consumer) == 1 then
    redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'IDLE', idle_ms, 'RETRYCOUNT', ARGV[i + 1], 'JUSTID')
    released = released + 1
  end
end
return released
