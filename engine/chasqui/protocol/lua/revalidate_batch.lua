-- Goes through a block of a batch before it is run again: what is still the driver's stays and has its claim renewed, what
-- is stale under anyone is taken back, what was settled, deleted or taken over by a worker that is alive is struck out.
-- Race: a worker takes an entry over at the same time: one of the two comes first, the other sees it.
-- KEYS[1] session
-- KEYS[2] batch
-- KEYS[3] stream
-- ARGV[1] token
-- ARGV[2] group
-- ARGV[3] consumer
-- ARGV[4] block
-- ARGV[5] min_idle_ms
-- returns {-1} the token is old; else {jobs that stay, jobs struck out}
local session, batch, stream = KEYS[1], KEYS[2], KEYS[3]
local token, group, consumer, block, min_idle_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local call = redis.call
if call('HGET', session, 'token') ~= token then return { -1 } end
local text = call('HGET', batch, 'b' .. block)
if not text then return { 0, 0 } end
local kept, dropped, renewed = {}, 0, { 'XCLAIM', stream, group, consumer, 0 }
for item, id in string.gmatch(text, '((%d+%-%d+):?%d*)') do
  local pending = call('XPENDING', stream, group, id, id, 1)[1]
  if not pending then
    dropped = dropped + 1
  elseif pending[2] == consumer then
    kept[#kept + 1] = item
    renewed[#renewed + 1] = id
  elseif pending[3] >= min_idle_ms
    and #call('XCLAIM', stream, group, consumer, min_idle_ms, id, 'RETRYCOUNT', pending[4] + 1, 'JUSTID') == 1 then
    kept[#kept + 1] = id .. ':' .. pending[4]
  else
    dropped = dropped + 1
  end
end
if #renewed > 5 then
  renewed[#renewed + 1] = 'JUSTID'
  call(unpack(renewed))
end
if dropped > 0 then
  call('HSET', batch, 'b' .. block, table.concat(kept, ' '))
  call('HINCRBY', batch, 'count', -dropped)
end
return { #kept, dropped }
