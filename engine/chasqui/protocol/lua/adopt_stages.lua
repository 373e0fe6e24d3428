-- Checks that stages of a manifest are whole and makes them the ledger's: from then on they do not expire.
-- Race: a stage expires while it is looked at: check and PERSIST are one step. Two drivers adopt the same manifest, or
-- one lost the reply: the ledger counts how many are adopted, and a slice that is not the next one is not looked at.
-- Words: adopted, with the stages adopted so far | expired, with the place of the stage | done, another manifest of the
-- version is published already | unfinished, with the version that is half published | ahead, with the higher version.
-- KEYS[1] ledger
-- KEYS[2...] stage keys of this slice, in the manifest's order
-- ARGV[1] version
-- ARGV[2] id       of the manifest
-- ARGV[3] first    place of the slice in the manifest, from 0
-- ARGV[4] stages   that the manifest has for this queue
-- ARGV[5] rows     in all of them
-- ARGV[6...] blocks that each stage of the slice has
-- returns {word, number}
local ledger = KEYS[1]
local version, id, first, stages, rows = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local call = redis.call
local found = call('TYPE', ledger).ok
if found ~= 'none' and found ~= 'hash' then
  return redis.error_reply('WRONGTYPE ' .. ledger .. ' holds a ' .. found)
end
local current = call('HMGET', ledger, 'version', 'manifest', 'state', 'adopted')
local adopted = 0
if current[1] then
  local ours, theirs = tonumber(version), tonumber(current[1])
  if theirs > ours then return { 'ahead', theirs } end
  if theirs == ours and current[2] == id then
    if current[3] ~= 'adopting' then return { 'adopted', stages } end
    adopted = tonumber(current[4])
  elseif theirs == ours and current[3] == 'done' then
    return { 'done', theirs }
  elseif current[3] ~= 'done' then
    return { 'unfinished', theirs }
  end
end
if adopted ~= first then return { 'adopted', adopted } end
for i = 2, #KEYS do
  if call('TYPE', KEYS[i]).ok ~= 'hash' or call('HLEN', KEYS[i]) ~= tonumber(ARGV[i + 4]) then
    return { 'expired', first + i - 2 }
  end
end
for i = 2, #KEYS do call('PERSIST', KEYS[i]) end
adopted = first + #KEYS - 1
local time = call('TIME')
call('HSET', ledger, 'version', version, 'manifest', id, 'state', adopted == stages and 'open' or 'adopting',
  'adopted', adopted, 'stages', stages, 'rows', rows, 'stage', 0, 'block', 0, 'job', 0, 'published', 0,
  'changed', time[1])
call('PERSIST', ledger)
return { 'adopted', adopted }
