-- Lets the ledger of a queue expire, once the version is closed at home.
-- Race: a later version may have opened the ledger meanwhile; an open one must not expire.
-- KEYS[1] ledger
-- ARGV[1] version
-- ARGV[2] ledger_ttl_ms
-- returns 1 it expires; 0 it is not this version's any more
local ledger, version, ledger_ttl_ms = KEYS[1], ARGV[1], ARGV[2]
local current = redis.call('HMGET', ledger, 'version', 'state')
if current[1] ~= version or current[2] ~= 'done' then return 0 end
return redis.call('PEXPIRE', ledger, ledger_ttl_ms)
