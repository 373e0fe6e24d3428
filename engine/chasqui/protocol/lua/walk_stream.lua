-- Counts along a stream and tells ids only: how far a number of entries, or of bytes, reaches.
-- Race: entries come and go between two calls; each call tells what stands there then, and changes nothing.
-- KEYS[1] stream
-- ARGV[1] after   begin behind this id
-- ARGV[2] upto    go no further than this id
-- ARGV[3] count   most entries; at most 1000 are walked in a call
-- ARGV[4] bytes   stop with the entry that brings their size to this; at most a megabyte is walked in a call
-- ARGV[5] step    tell the id of every step-th entry
-- ARGV[6] done    entries walked by earlier calls since the last such id
-- returns {entries walked, their bytes, id of the last or '', {ids of every step-th}}
local stream, after, upto = KEYS[1], '(' .. ARGV[1], ARGV[2]
local count, bytes = math.min(tonumber(ARGV[3]), 1000), math.min(tonumber(ARGV[4]), 1048576)
local step, done = tonumber(ARGV[5]), tonumber(ARGV[6])
local walked, size, last, marks = 0, 0, '', {}
-- Behind the highest id of all there is nothing to ask for: the server calls that an error.
local HIGHEST = '18446744073709551615-18446744073709551615'
-- A few at a time: entries may be large, and all that one call fetches is copied into this script's memory.
local ask = 8
while walked < count and size < bytes and last ~= upto and last ~= HIGHEST do
  local entries = redis.call('XRANGE', stream, after, upto, 'COUNT', math.min(ask, count - walked))
  if #entries == 0 then break end
  for _, entry in ipairs(entries) do
    last, walked = entry[1], walked + 1
    for _, value in ipairs(entry[2]) do size = size + #value end
    if (done + walked) % step == 0 then marks[#marks + 1] = last end
    if size >= bytes then break end
  end
  after = '(' .. last
  ask = math.max(1, math.min(250, math.floor(131072 * walked / (size + 1))))
end
return { walked, size, last, marks }
