-- Removes names of workers that are gone: idle for long, and nothing pending.
-- Race: a worker that comes back between look and removal would lose its pending list; here nothing comes between.
-- KEYS[1] stream
-- ARGV[1] group
-- ARGV[2] idle_ms   forget who has been idle for so long
-- ARGV[3] own       a name to forget whatever its idle time, if nothing is pending; may be empty
-- returns the names removed
local stream, group, idle_ms, own = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local removed = {}
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local found = {}
  for i = 1, #info, 2 do found[info[i]] = info[i + 1] end
  if found.pending == 0 and (found.idle >= idle_ms or found.name == own) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, found.name)
    removed[#removed + 1] = found.name
  end
end
return removed
