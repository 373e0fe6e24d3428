-- Removes names of workers that are gone, if nothing is pending for them.
-- Race: a worker that comes back between look and removal would lose its pending list; here nothing comes between.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2...] names
-- returns the names removed
local stream, group = KEYS[1], ARGV[1]
local removed = {}
for i = 2, #ARGV do
  if #redis.call('XPENDING', stream, group, '-', '+', 1, ARGV[i]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, ARGV[i])
    removed[#removed + 1] = ARGV[i]
  end
end
return removed
