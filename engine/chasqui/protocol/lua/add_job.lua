-- Adds one job to the stream, unless it is full. Not to be sent twice: without an id nothing tells the two apart.
-- KEYS[1] stream
-- ARGV[1] cap       refuse when the stream holds this many; 0 = never
-- ARGV[2] trim      MAXLEN ~ of the XADD; 0 = none
-- ARGV[3] envelope
-- ARGV[4] name      may be empty
-- returns 1; -1 full
local stream = KEYS[1]
local cap, trim, envelope, name = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
if cap > 0 and redis.call('XLEN', stream) >= cap then return -1 end
local args = { 'XADD', stream, '*', 'd', envelope }
if trim ~= '0' then args = { 'XADD', stream, 'MAXLEN', '~', trim, '*', 'd', envelope } end
if name ~= '' then
  args[#args + 1] = 'n'
  args[#args + 1] = name
end
redis.call(unpack(args))
return 1
