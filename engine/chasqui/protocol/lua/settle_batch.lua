-- Ends a block of a batch that Spark has committed: its jobs are acknowledged and deleted, and the block is gone.
-- Race: three places settle, in two processes, and any of them may be cut off: a block is settled once, and only jobs
-- that are still pending for the batch's own consumer are touched. With its last block the batch is gone. One that was
-- released is just removed.
-- KEYS[1] batch
-- KEYS[2] stream
-- ARGV[1] group
-- ARGV[2] consumer
-- ARGV[3] block
-- ARGV[4] how       ack: they are done; release: what is left is free for any worker; drop: they were settled otherwise
-- ARGV[5] idle_ms   the idle time of released ones: the threshold of those who look for stale jobs
-- returns how many jobs were acknowledged or released
local batch, stream, group, consumer, block, how, idle_ms = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local call = redis.call
local held = call('HMGET', batch, 'b' .. block, 'state')
local text, ours = held[1], {}
if held[2] then
  call('DEL', batch)
  return 0
end
if not text then return 0 end
if how ~= 'drop' then
  local ids, before, again = {}, {}, false
  for id, count in string.gmatch(text, '(%d+%-%d+):?(%d*)') do
    ids[#ids + 1] = id
    before[id] = count == '' and '0' or count
    again = again or count ~= ''
  end
  if again then
    for _, id in ipairs(ids) do
      if #call('XPENDING', stream, group, id, id, 1, consumer) == 1 then ours[#ours + 1] = id end
    end
  elseif #ids > 0 then
    -- New jobs were taken in one go: between the first and the last there are no others of ours.
    for i, pending in ipairs(call('XPENDING', stream, group, ids[1], ids[#ids], #ids, consumer)) do ours[i] = pending[1] end
  end
  if #ours > 0 and how == 'ack' then
    call('XACK', stream, group, unpack(ours))
    call('XDEL', stream, unpack(ours))
  elseif how == 'release' then
    for _, id in ipairs(ours) do
      call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', idle_ms, 'RETRYCOUNT', before[id] or '0', 'JUSTID')
    end
  end
end
call('HDEL', batch, 'b' .. block)
if call('HINCRBY', batch, 'left', -1) <= 0 then call('DEL', batch) end
return #ours
