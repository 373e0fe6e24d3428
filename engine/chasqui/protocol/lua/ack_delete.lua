-- Ends jobs that are done: out of the pending list and out of the stream, in one step.
-- Race: killed between the two, an entry would stay in the stream, neither pending nor new, for ever.
-- A second call for the same ids finds nothing and changes nothing.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2...] entry ids
-- returns how many were pending
local stream, group = KEYS[1], ARGV[1]
local acked = redis.call('XACK', stream, group, unpack(ARGV, 2))
redis.call('XDEL', stream, unpack(ARGV, 2))
return acked
