-- Moves jobs that are given up from the stream to the dead letters, each only while it is still pending for this worker.
-- Race: as in retry_later: a claim or a reply that was lost writes nothing a second time. The order is as there, too.
-- KEYS[1] stream
-- KEYS[2] dlq
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3] max_len   MAXLEN ~ of the dead letters
-- ARGV[4...] six per job: entry id, envelope, name, reason, detail, error; the last three and the name may be empty
-- returns a list, a job each: 1 moved, 0 not ours
local stream, dlq, group, consumer, max_len = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local found = redis.call('TYPE', dlq).ok
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. dlq .. ' holds a ' .. found)
end
redis.call('XACK', stream, group, '0-0')
redis.call('XDEL', stream, '0-0')
local moved = {}
for i = 4, #ARGV, 6 do
  local id, name, detail, failure = ARGV[i], ARGV[i + 2], ARGV[i + 4], ARGV[i + 5]
  if #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 1 then
    local entry = { 'XADD', dlq, 'MAXLEN', '~', max_len, '*', 'd', ARGV[i + 1] }
    local function put(field, value)
      if value ~= '' then
        entry[#entry + 1] = field
        entry[#entry + 1] = value
      end
    end
    put('n', name)
    put('source_id', id)
    put('reason', ARGV[i + 3])
    put('detail', detail)
    put('error', failure)
    redis.call(unpack(entry))
    redis.call('XACK', stream, group, id)
    redis.call('XDEL', stream, id)
    moved[#moved + 1] = 1
  else
    moved[#moved + 1] = 0
  end
end
return moved
