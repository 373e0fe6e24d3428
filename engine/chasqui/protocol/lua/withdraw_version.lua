-- Gives up a version of which nothing is published, because staged rows of it are gone.
-- Race: another driver decides to publish it: home decides which of the two it is.
-- KEYS[1] home
-- ARGV[1] version
-- ARGV[2] id        of the manifest
-- returns the state of that version: withdrawn | open | done; gone where home has another version or manifest
local home, version, id = KEYS[1], ARGV[1], ARGV[2]
local current = redis.call('HMGET', home, 'version', 'state', 'manifest')
if current[1] ~= version then return 'gone' end
if current[2] == 'done' then return 'done' end
if current[3] ~= id then return 'gone' end
if current[2] ~= 'staged' then return current[2] end
redis.call('HSET', home, 'state', 'withdrawn')
return 'withdrawn'
