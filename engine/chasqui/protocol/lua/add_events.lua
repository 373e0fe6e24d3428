-- Appends events that differ in the job's id only, in the order of the ids, and trims the stream.
-- Race: a call whose reply was lost is not sent again: nothing would tell an event from its double.
-- KEYS[1] events
-- ARGV[1] max_len
-- ARGV[2] event
-- ARGV[3] fields      how many arguments follow the id in each of them
-- ARGV[4...] these fields and values in turn, then the ids of the jobs
-- returns nothing
local events, max_len, event, fields = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local first = 4 + fields
local rest = { unpack(ARGV, 4, first - 1) }
for i = first, #ARGV do
  redis.call('XADD', events, '*', 'e', event, 'id', ARGV[i], unpack(rest))
end
redis.call('XTRIM', events, 'MAXLEN', '~', max_len)
