-- Ends jobs that are done, each only while it is pending for a consumer whose name starts with the prefix, and stores what
-- they returned.
-- Race: the outcome comes a second time, or late, when a worker of another kind has the job: then nothing happens.
-- A result that cannot be stored (out of memory) does not bring the job back.
-- KEYS[1] stream
-- KEYS[2...] result keys, of the jobs that have a result
-- ARGV[1] group
-- ARGV[2] prefix
-- ARGV[3] ttl_s
-- ARGV[4] count
-- ARGV[5...] so many entry ids, then two per result, in the order of KEYS: the place of its job among them, the result
-- returns a list, a job each: 1 ended here, 0 not a Spark consumer's any more
local stream, group, prefix, ttl_s, count = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local call, first = redis.call, 5
if count == 0 then return {} end
local function spark_has(pending) return pending and string.sub(pending[2], 1, #prefix) == prefix end

-- Jobs that were taken together stand side by side, so one look finds most of them; the others are looked for one by one.
local ended, ours, held = {}, {}, {}
for _, pending in ipairs(call('XPENDING', stream, group, ARGV[first], ARGV[first + count - 1], count)) do
  held[pending[1]] = spark_has(pending)
end
for i = 1, count do
  local id = ARGV[first + i - 1]
  local mine = held[id]
  if mine == nil then mine = spark_has(call('XPENDING', stream, group, id, id, 1)[1]) end
  ended[i] = mine and 1 or 0
  if mine then ours[#ours + 1] = id end
end
for i = first + count, #ARGV, 2 do
  if ended[tonumber(ARGV[i])] == 1 then
    redis.pcall('SET', KEYS[2 + (i - first - count) / 2], ARGV[i + 1], 'EX', ttl_s)
  end
end
if #ours > 0 then
  call('XACK', stream, group, unpack(ours))
  call('XDEL', stream, unpack(ours))
end
return ended
