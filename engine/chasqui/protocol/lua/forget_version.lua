-- Ends a withdrawal: home goes back to the last version that was closed.
-- Race: two drivers end it, or a reply was lost: only the state "withdrawn" is left this way.
-- KEYS[1] home
-- KEYS[2] manifest
-- KEYS[3] queues
-- ARGV[1] version
-- ARGV[2] id            of the manifest
-- ARGV[3] ledger_ttl_ms
-- returns 1 forgotten now; 0 home stands otherwise
local home, manifest, queues = KEYS[1], KEYS[2], KEYS[3]
local version, id, ledger_ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
local current = call('HMGET', home, 'version', 'state', 'manifest', 'done')
if current[1] ~= version or current[2] ~= 'withdrawn' or current[3] ~= id then return 0 end
call('UNLINK', manifest)
if current[4] then
  call('HSET', home, 'version', current[4], 'state', 'done')
  call('HDEL', home, 'manifest')
  call('PEXPIRE', home, ledger_ttl_ms)
  call('PEXPIRE', queues, ledger_ttl_ms)
else
  call('DEL', home, queues)
end
return 1
