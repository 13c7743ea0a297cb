-- Health of an OPDJob for Argo CD: docs/argocd.md says where it goes.
-- Succeeded is Healthy, Failed is Degraded, suspended is Suspended, everything else is Progressing with what the job waits for.

local function condition(kind)
  for _, entry in ipairs(obj.status.conditions or {}) do
    if entry.type == kind then
      return entry
    end
  end
  return { status = "Unknown", reason = "", message = "" }
end

local function health(status, message)
  return { status = status, message = message }
end

if obj.status == nil or obj.status.phase == nil then
  return health("Progressing", "the operator has not seen the job yet")
end
if obj.status.observedGeneration ~= nil and obj.status.observedGeneration < obj.metadata.generation then
  return health("Progressing", "the operator has not seen the last change of the spec yet")
end

local phase = obj.status.phase
local failed = condition("Failed")
if failed.status == "True" then
  return health("Degraded", failed.reason .. ": " .. (failed.message or ""))
end
if condition("Succeeded").status == "True" then
  return health("Healthy", "the distilled student is there")
end
if phase == "Suspended" then
  return health("Suspended", "spec.suspend is true; no accelerator is held")
end

local message = phase
if obj.status.stepProgress ~= nil then
  message = message .. ", step " .. obj.status.stepProgress
end
local progressing = condition("Progressing")
if progressing.status == "False" then
  message = message .. ", waits (" .. progressing.reason .. "): " .. (progressing.message or "")
end
return health("Progressing", message)
