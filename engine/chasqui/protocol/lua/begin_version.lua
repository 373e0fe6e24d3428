-- Makes a manifest the one of its version. The first manifest of a version wins: a run that comes later works from it.
-- Race: two drivers with one version, or one whose reply was lost: both are told whose manifest it is. A manifest that
-- is not there whole (its key expired) is never registered. The word that is returned: ours | other (same version,
-- another manifest) | done (same version) | unfinished (a lower version) | ahead (a higher one) | torn (not whole).
-- KEYS[1] home
-- KEYS[2] manifest
-- KEYS[3] queues
-- ARGV[1] version
-- ARGV[2] id         of the manifest
-- ARGV[3] pieces     that the manifest has; 0 = there are no rows, and no key
-- ARGV[4] by         who writes, among those that share the name; empty = not told
-- returns {word, version, state, manifest id, by}, the last four as home has them
local home, manifest, queues = KEYS[1], KEYS[2], KEYS[3]
local version, id, pieces, by = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local call = redis.call
for key, wanted in pairs({ [home] = 'hash', [manifest] = 'hash', [queues] = 'set' }) do
  local found = call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
local function standing(word)
  local now = call('HMGET', home, 'version', 'state', 'manifest', 'by')
  return { word, now[1] or '', now[2] or '', now[3] or '', now[4] or '' }
end
local current = call('HMGET', home, 'version', 'state', 'manifest')
if current[1] and current[2] ~= 'done' then
  -- The caller has just written its manifest, and the queues, with a TTL: what an unfinished version needs must stay.
  call('PERSIST', queues)
  if current[3] == id then call('PERSIST', manifest) end
end
if current[1] then
  local ours, theirs = tonumber(version), tonumber(current[1])
  if theirs > ours then return standing('ahead') end
  if theirs == ours then
    if current[2] == 'done' then return standing('done') end
    return standing(current[3] == id and 'ours' or 'other')
  end
  if current[2] ~= 'done' or current[3] then return standing('unfinished') end
end
if call('HLEN', manifest) ~= pieces then return standing('torn') end
call('HSET', home, 'version', version, 'state', 'staged', 'manifest', id, 'by', by)
call('PERSIST', home)
call('PERSIST', manifest)
call('PERSIST', queues)
return standing('ours')
