-- Deletes stages of a withdrawn version, and with the last of them the ledger that had adopted them.
-- Race: the ledger belongs to another version or manifest by now, or is half published: then it is left alone.
-- KEYS[1] ledger
-- KEYS[2...] stage keys
-- ARGV[1] id     of the manifest
-- ARGV[2] last   1: these are the last stages of the manifest in this queue
-- returns 1; 0 when the ledger has published some of it, and nothing was deleted
local ledger, id, last = KEYS[1], ARGV[1], ARGV[2] == '1'
local call = redis.call
local current = call('HMGET', ledger, 'manifest', 'published')
local mine = current[1] == id
if mine and tonumber(current[2]) > 0 then return 0 end
for i = 2, #KEYS do call('UNLINK', KEYS[i]) end
if mine and last then call('DEL', ledger) end
return 1
