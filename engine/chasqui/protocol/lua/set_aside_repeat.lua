-- Moves a repeat spec that cannot be understood to the dead letters, so that it does not come up again and again.
-- Race: two leaders, a call sent again after a lost reply, an upsert that has just mended it: it acts only while we
-- hold the lease and the spec stands, with the same score and the same bytes, as it was judged.
-- KEYS[1] lock
-- KEYS[2] repeat
-- KEYS[3] spec      the hash; a key of another type is left alone
-- KEYS[4] dlq
-- ARGV[1] holder
-- ARGV[2] key       the spec's
-- ARGV[3] score     as it was read
-- ARGV[4] sha       SHA-1, in hex, of the stored bytes that were read; of nothing where there were none
-- ARGV[5] dlq_len   MAXLEN ~ of the dead letters
-- ARGV[6] detail
-- returns 1 moved; 0 not as judged; -2 another leads
local lock, repeats, spec, dlq = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, key, score, sha, dlq_len, detail = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local call = redis.call
if call('GET', lock) ~= holder then return -2 end
if call('ZSCORE', repeats, key) ~= score then return 0 end
local is_hash = call('TYPE', spec).ok == 'hash'
local stored = is_hash and call('HGET', spec, 'spec') or ''
if redis.sha1hex(stored) ~= sha then return 0 end
local found = call('TYPE', dlq).ok
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. dlq .. ' holds a ' .. found)
end
call('XADD', dlq, 'MAXLEN', '~', dlq_len, '*', 'd', stored, 'source_id', '', 'reason', 'malformed', 'detail', detail)
call('ZREM', repeats, key)
if is_hash then call('DEL', spec) end
return 1
