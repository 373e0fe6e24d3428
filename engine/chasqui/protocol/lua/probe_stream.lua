-- Looks at a stream around guessed ids: where the nearest entries stand, and how densely.
-- Race: none that matters: entries come and go, the answer is an estimate, and nothing is changed. An id is '' where
-- there is no entry on that side.
-- KEYS[1] stream
-- ARGV[1] first    the range begins with this id
-- ARGV[2] last     and ends with this one
-- ARGV[3...] guess  ids of the range, at most 15
-- returns for each guess {id before it, id that counting back came to, count, id at or after it, that onwards, count}
local stream, first, last = KEYS[1], ARGV[1], ARGV[2]
local WINDOW, BYTES = 24, 32768

local function range(back, from, to, count)
  if back then return redis.call('XREVRANGE', stream, from, to, 'COUNT', count) end
  return redis.call('XRANGE', stream, from, to, 'COUNT', count)
end

local function ms(id) return string.match(id, '^%d+') end
local function seq(id) return tonumber(string.match(id, '%d+$')) end

-- The nearest entry on one side, another further away, and how many stand between them, one of the two included.
local function look(back, from, to)
  local nearest = range(back, from, to, 1)[1]
  if not nearest then return '', '', 0 end
  local near, size = nearest[1], 1
  for _, value in ipairs(nearest[2]) do size = size + #value end
  local entries = range(back, near, to, math.max(2, math.min(WINDOW, math.floor(BYTES / size))))
  local far = entries[#entries][1]
  if ms(far) ~= ms(near) then return near, far, #entries - 1 end
  -- A whole window inside one millisecond: ids there are numbered, so its other end tells how many there are. A few
  -- milliseconds are taken together, because bulks come and pause at that pace.
  local count, from = 0, near
  for _ = 1, 2 do
    local edge = back and ms(from) .. '-0' or ms(from) .. '-18446744073709551615'
    local outermost = range(not back, edge, from, 1)[1]
    far = outermost and outermost[1] or from
    count = count + math.abs(seq(far) - seq(from)) + 1
    if far == to then return near, far, count end
    local beyond = range(back, '(' .. far, to, 1)[1]
    if not beyond then return near, far, count end
    from = beyond[1]
  end
  return near, from, count
end

local answer = {}
for i = 3, #ARGV do
  local before, before_from, before_count = '', '', 0
  -- Not before the range: looking back from where no entry is before walks the whole stream, in every server.
  if ARGV[i] ~= first then before, before_from, before_count = look(true, '(' .. ARGV[i], first) end
  local at, at_to, at_count = look(false, ARGV[i], last)
  answer[#answer + 1] = { before, before_from, before_count, at, at_to, at_count }
end
return answer
