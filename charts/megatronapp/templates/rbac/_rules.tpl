{{/* What the operator does to jobs and what belongs to them, in every namespace that it watches. No right to read
Secrets: those of jobs are derived from the chart's key. */}}
{{- define "megatronapp.operatorRules" -}}
- apiGroups: [megatronapp.io]
  resources: [megatronjobs]
  verbs: [get, list, watch, delete] # delete: runPolicy.ttlSecondsAfterFinished
- apiGroups: [megatronapp.io]
  resources: [megatronprofiles] # below the jobs of their namespaces
  verbs: [list, watch]
- apiGroups: [megatronapp.io]
  resources: [megatronjobs/status]
  verbs: [update]
- apiGroups: [megatronapp.io]
  resources: [megatronjobs/finalizers] # owner references that block deletion
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete, patch] # patch: restarts in place, and the node's topology, as annotations
- apiGroups: [""]
  resources: [configmaps] # applied, which creates or patches; delete: what an edited job does not want any more
  verbs: [create, patch, delete]
- apiGroups: [""]
  resources: [services] # delete: what an edited job does not want any more; list: what somebody has deleted
  verbs: [list, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets] # runPolicy.disruption
  verbs: [list, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims] # whether several nodes may write to it
  verbs: [get]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- range $name, $group := dict "volcano" "scheduling.volcano.sh" "coscheduling" "scheduling.x-k8s.io" "kai" "scheduling.run.ai" }}
{{- if get $.Values.rbac $name }}
- apiGroups: [{{ $group }}]
  resources: [podgroups]
  verbs: [get, create, patch, delete]
{{- end }}
{{- end }}
{{- if .Values.rbac.kubernetes }}
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups, workloads] # the first from Kubernetes 1.36 on, the second in 1.35
  verbs: [get, create, patch, delete]
{{- end }}
{{- if .Values.rbac.kueue }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, delete]
{{- end }}
{{- end -}}

{{/* The gateway finds jobs and the pods of their hubs; it changes nothing. */}}
{{- define "megatronapp.gatewayRules" -}}
- apiGroups: [megatronapp.io]
  resources: [megatronjobs]
  verbs: [get, list]
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
{{- end -}}

{{/* Subjects of gateway.users. */}}
{{- define "megatronapp.gatewayUsers" -}}
{{- range .Values.gateway.users }}
- kind: {{ .kind }}
  name: {{ .name | quote }}
  {{- if eq .kind "ServiceAccount" }}
  namespace: {{ .namespace | default $.Release.Namespace }}
  {{- else }}
  apiGroup: rbac.authorization.k8s.io
  {{- end }}
{{- end }}
{{- end -}}
