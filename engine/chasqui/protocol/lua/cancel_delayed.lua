-- Takes a delayed job out by its id.
-- Race: cancel against promote. Both run here one after the other; whoever removes the member has the job.
-- After a cancel the id is free again.
-- KEYS[1] delayed
-- KEYS[2] index    didx of the id: the member's bytes
-- KEYS[3] marker   dlid of the id
-- returns 1 cancelled; 0 not there (never added with an id, promoted already, or cancelled)
local delayed, index, marker = KEYS[1], KEYS[2], KEYS[3]
local member = redis.call('GET', index)
if not member or redis.call('ZREM', delayed, member) == 0 then return 0 end
redis.call('DEL', index, marker)
return 1
