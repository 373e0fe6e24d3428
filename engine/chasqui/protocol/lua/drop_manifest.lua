-- Removes the manifest of a closed version: the last step, which tells that nothing of it is left to do.
-- Race: a later version has begun: then home is not touched, and the manifest expires by itself.
-- KEYS[1] home
-- KEYS[2] manifest
-- ARGV[1] version
-- ARGV[2] id        of the manifest
-- returns 1 removed now; 0 home stands otherwise
local home, manifest, version, id = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local current = redis.call('HMGET', home, 'version', 'state', 'manifest')
if current[1] ~= version or current[2] ~= 'done' or current[3] ~= id then return 0 end
redis.call('HDEL', home, 'manifest')
redis.call('UNLINK', manifest)
return 1
