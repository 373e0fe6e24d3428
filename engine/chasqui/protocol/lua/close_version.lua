-- All queues of a version are published: it is done.
-- Race: two drivers close it, or a reply was lost: both find it done. A version that home has left stays as it is.
-- KEYS[1] home
-- KEYS[2] manifest
-- KEYS[3] queues
-- ARGV[1] version
-- ARGV[2] id             of the manifest
-- ARGV[3] ledger_ttl_ms
-- returns 1 done, now or before; 0 home has another version, or this one is not open
local home, manifest, queues = KEYS[1], KEYS[2], KEYS[3]
local version, id, ledger_ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
local current = call('HMGET', home, 'version', 'state', 'manifest')
if current[1] ~= version then return 0 end
if current[2] == 'done' then return 1 end
if current[2] ~= 'open' or current[3] ~= id then return 0 end
call('HSET', home, 'state', 'done', 'done', version)
call('PEXPIRE', home, ledger_ttl_ms)
call('PEXPIRE', manifest, ledger_ttl_ms)
call('PEXPIRE', queues, ledger_ttl_ms)
return 1
