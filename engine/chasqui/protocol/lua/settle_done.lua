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
local ended, ours, owners = {}, {}, {}
if count == 0 then return ended end
-- Jobs that were taken together stand side by side, so one look finds most of them; the others are looked for one by one.
for _, pending in ipairs(call('XPENDING', stream, group, ARGV[first], ARGV[first + count - 1], count)) do
  owners[pending[1]] = pending[2]
end
for i = 1, count do
  local id = ARGV[first + i - 1]
  local owner = owners[id]
  if not owner then
    local pending = call('XPENDING', stream, group, id, id, 1)[1]
    owner = pending and pending[2] or ''
  end
  if string.sub(owner, 1, #prefix) == prefix then
    ours[#ours + 1] = id
    ended[i] = 1
  else
    ended[i] = 0
  end
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
