import sys, time, copy
import torch
import torch.nn.functional as F
import common, spamm_torch
from spamm_torch import SpAMMConfig, convert_, revert_
from models.data import load_digits, to_pictures
from models.vgg13 import *
from models.training import TrainConfig, one_cycle
from pathlib import Path
which, ckpt, data = sys.argv[1:4]
part = sys.argv[4]
dev = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
if dev.type=='cpu': torch.set_num_threads(2)
torch.backends.cudnn.benchmark = True
T0=time.time()
ck=torch.load(ckpt,weights_only=True,map_location='cpu'); cfg=TrainConfig(**ck['config'])
src=cfg.build(); src.load_state_dict(ck['model']); src=src.eval().to(dev)
m=fold_batch_norm(src)
tr,va=load_digits(data or None,cfg.full).split(cfg.seed)
tr,va=tr.to(dev),va.to(dev)
NV=int(sys.argv[5]) if len(sys.argv)>5 else len(va)
vx,vy=to_pictures(va.images[:NV]),va.labels[:NV].long()
sx=to_pictures(tr.images[:512])
convs=CONVOLUTIONS
PB=(64,1,1)
flops={n:getattr(m,n).weight.numel()*s for n,s in zip(convs,(1024,1024,256,256,64,64,16,16,4,4))}
tot=sum(flops[n] for n in convs[1:])
@torch.inference_mode()
def acc(model,batch=128):
    out=torch.cat([model(x) for x in vx.split(batch)])
    return out.argmax(1),(out.argmax(1)==vy).double().mean().item()*100
def log(*a): print(which,f'{time.time()-T0:.0f}s',*a,flush=True)
def report(tag,model,batch=128):
    a=acc(model,batch); log(tag,'drop',round(a[1]-base[1],2),'changed',round((a[0]!=base[0]).double().mean().item()*100,2)); return a[1]-base[1]
def swap(model,ratios,block=None):
    m2=copy.deepcopy(model)
    for n in convs[1:]:
        r=ratios[n] if isinstance(ratios,dict) else ratios
        setattr(m2,n,spamm_torch.SpAMMConv2d.from_dense(getattr(m2,n),valid_ratio=r,block=block,pixel_block=PB))
    return m2.to(memory_format=torch.channels_last)
@torch.inference_mode()
def activations(model,x):
    res={};cur=None;ins={}
    for n,l in model.named_children():
        if n.startswith('conv'): cur=n; ins[n]=x
        x=l(x)
        if n.startswith('relu') and 'fc' not in n: res[cur]=x
        if n=='flatten': break
    return ins,res
def permute(model,perms):
    m=copy.deepcopy(model); prev=None
    with torch.no_grad():
        for n in convs:
            c=getattr(m,n)
            if prev is not None: c.weight.copy_(c.weight[:,prev].clone())
            p=perms.get(n)
            if p is not None:
                c.weight.copy_(c.weight[p].clone()); c.bias.copy_(c.bias[p].clone())
                b=getattr(m,n.replace('conv','bn'),None)
                if b is not None:
                    for t in (b.weight,b.bias,b.running_mean,b.running_var): t.copy_(t[p].clone())
            prev=p
        if prev is not None: m.fc1.weight.copy_(m.fc1.weight[:,prev].clone())
    return m
def by_act(model):
    ins,res=activations(model,sx)
    return {n:res[n].square().mean((0,2,3)).argsort(descending=True,stable=True) for n in convs}
def by_both(model):
    ins,res=activations(model,sx); P={}
    for n,nx in zip(convs,convs[1:]+('fc1',)):
        e=res[n].square().mean((0,2,3)); w=getattr(model,nx).weight
        w=w.square().sum((0,2,3)) if w.dim()==4 else w.square().sum(0)
        P[n]=(e*w).argsort(descending=True,stable=True)
    return P
B=64
def windows(e):
    C,H,W=e.shape
    return F.unfold(e[None],3,padding=1).view(C,9,H*W)
def assign(cost,b):
    cost=cost.cpu(); b=b.cpu().clone(); K=cost.shape[1]
    for _ in range(20):
        moved=0
        for x in range(K):
            for y in range(x+1,K):
                ix=(b==x).nonzero()[:,0]; iy=(b==y).nonzero()[:,0]
                gx,ox=(cost[ix,x]-cost[ix,y]).sort(descending=True); gy,oy=(cost[iy,y]-cost[iy,x]).sort(descending=True)
                n=min(len(gx),len(gy)); k=int((gx[:n]+gy[:n]>1e-9).sum())
                b[ix[ox[:k]]]=y; b[iy[oy[:k]]]=x; moved+=k
        if not moved: break
    return b.to(dev)
def masks(w,v,pi,po,rho):
    I=int(po.max())+1;K=int(pi.max())+1
    A=torch.zeros(I,9,w.shape[2],device=dev).index_add_(0,po,w)
    A=torch.zeros(I,9,K,device=dev).index_add_(2,pi,A)
    V=torch.zeros(K,9,v.shape[2],device=dev).index_add_(0,pi,v)
    prod=torch.einsum('itk,ktj->itkj',A,V)
    t=prod.flatten().kthvalue(max(1,int((1-rho)*prod.numel()))).values
    return prod<t, V
@torch.no_grad()
def optimise(model,rho=0.35,iters=10,alpha=1.0,init=None):
    ins,res=activations(model,sx)
    w={n:getattr(model,n).weight.detach().square().flatten(2).transpose(1,2).contiguous() for n in convs}
    v={n:windows(ins[n].square().mean(0)) for n in convs}
    init=init or by_both(model); blk={}
    for n in convs:
        C=w[n].shape[0]; b=torch.empty(C,dtype=torch.long,device=dev); b[init[n]]=torch.arange(C,device=dev)//B; blk[n]=b
    first=torch.zeros(3,dtype=torch.long,device=dev); fcw=model.fc1.weight.detach().square().sum(0)
    for it in range(iters):
        changed=0
        for g,n in enumerate(convs):
            C=w[n].shape[0]
            if C<=B: continue
            rr=rho[n] if isinstance(rho,dict) else rho
            bi=blk[convs[g-1]] if g else first
            cost=torch.zeros(C,C//B,device=dev)
            nxt=convs[g+1] if g+1<len(convs) else None
            if nxt:
                sk,V=masks(w[nxt],v[nxt],blk[n],blk[nxt],rho[nxt] if isinstance(rho,dict) else rho)
                Wi=torch.zeros(sk.shape[0],9,C,device=dev).index_add_(0,blk[nxt],w[nxt])
                Y=torch.einsum('itkj,ctj->itkc',sk.float(),v[nxt])
                cost+=torch.einsum('itkc,itc->ck',Y,Wi)/torch.einsum('itc,ctj->',Wi,v[nxt])
                imp=w[nxt].sum((0,1))
            else: imp=fcw
            if alpha:
                sk,V=masks(w[n],v[n],bi,blk[n],rr)
                Wk=torch.zeros(C,9,sk.shape[2],device=dev).index_add_(2,bi,w[n])
                Vm=V/torch.bincount(bi).float()[:,None,None]
                Y=torch.einsum('ktj,itkj->itk',Vm,sk.float())
                E=torch.einsum('ctk,itk->ci',Wk,Y)
                cost+=alpha*E*imp[:,None]/torch.einsum('ctk,ktj,c->',Wk,Vm,imp)
            nb=assign(cost,blk[n]); changed+=(nb!=blk[n]).sum().item(); blk[n]=nb
        if changed==0: break
    return {n:blk[n].argsort(stable=True) for n in convs}
RS=(1.0,0.85,0.7,0.6,0.5,0.42,0.34,0.26,0.18)
@torch.inference_mode()
def curves(model,x):
    ins,res=activations(model,x); E={}
    for n in convs[1:]:
        c=getattr(model,n); ref=res[n]
        E[n]=[0.]+[((spamm_torch.conv2d(ins[n],c.weight,c.bias,1,1,valid_ratio=r,pixel_block=PB,activation='relu')-ref).norm()/ref.norm()).item()**2 for r in RS[1:]]
    return E
def interp(E,n,r):
    for i in range(len(RS)-1):
        if RS[i+1]<=r<=RS[i]:
            f=(r-RS[i+1])/(RS[i]-RS[i+1]); return E[n][i]*f+E[n][i+1]*(1-f)
def allocate(E,budget,mode,p=1.0):
    fine=[0.18+0.005*i for i in range(165)]
    lo,hi=(1e-12,10.)
    for _ in range(80):
        lam=(lo*hi)**.5
        if mode=='equal': r={n:next((f for f in fine if interp(E,n,f)<=lam),1.0) for n in E}
        else: r={n:min(fine,key=lambda f:interp(E,n,f)**p+lam*f*flops[n]/tot) for n in E}
        used=sum(r[n]*flops[n] for n in E)/tot
        if used>budget: lo=lam
        else: hi=lam
    if mode=='equal': r={n:next((f for f in fine if interp(E,n,f)<=hi),1.0) for n in E}
    else: r={n:min(fine,key=lambda f:interp(E,n,f)**p+hi*f*flops[n]/tot) for n in E}
    return r,sum(r[n]*flops[n] for n in E)/tot
def tune(start,ratios,peak,steps,shifted=0.0,batch=100,evals=(),reg=0):
    from models.data import draw_shifts
    model=swap(start,ratios).train(); opt=torch.optim.Adam(model.parameters(),fused=True)
    g=torch.Generator().manual_seed(5); order=torch.randperm(len(tr),generator=g).to(dev); t=time.time()
    for s in range(steps):
        part=tr[order[s*batch:(s+1)*batch]]
        x=to_pictures(part.images,draw_shifts(len(part.labels),g,shifted))
        for gr in opt.param_groups: gr['lr']=one_cycle(peak,s/steps)
        loss=F.cross_entropy(model(x),part.labels.long()); opt.zero_grad(); loss.backward(); opt.step()
    log(f'tuned {steps} steps in {time.time()-t:.1f}s loss {loss.item():.3f}')
    return model.eval()
base=acc(m); log('dense',round(base[1],3),'of',NV,'bn' if src.batch_norm else 'plain')
if part=='order':
    P={'none':{},'both':by_both(m)}
    def allocs(n):
        pm=permute(m,P[n]); E=curves(pm,sx)
        for k in E: log(n,k,' '.join(f'{e**.5:.3f}' for e in E[k]))
        report(f'order {n} uniform .35',swap(pm,.35))
        for mode,p in (('equal',1),('lagr',1.),('lagr',.5),('lagr',2.)):
            r,u=allocate(E,.35,mode,p); report(f'order {n} {mode} {p} {u:.3f} '+' '.join(f'{v:.2f}' for v in r.values()),swap(pm,r))
    allocs('both'); allocs('none')
    P['opt.35']=optimise(m,.35,6); allocs('opt.35')
    pm=permute(m,P['both'])
    for r in (.42,.30): report(f'both uniform {r}',swap(pm,r))
    for b in (32,(64,32,64),(32,64,64),128):
        try: report(f'both block {b} uniform .35',swap(pm,.35,b))
        except Exception as e: log('block',b,str(e)[:100])
else:
    steps=int(sys.argv[6]) if len(sys.argv)>6 else 560
    start={'raw':src,'folded':m}
    runs=[('folded',3e-4,.3,0.,False),('folded',1e-4,.3,0.,False),('folded',3e-4,.3,0.,True),('folded',3e-4,.3,.5,False)]
    if src.batch_norm: runs=[('raw',3e-4,.3,0.,False),('folded',3e-4,.3,0.,False),('raw',1e-3,.3,0.,False),('folded',1e-4,.3,0.,True)]
    for form,peak,ratio,sh,ordered in runs:
        s=start[form]
        if ordered: s=permute(s,by_both(m))
        tm=tune(s,ratio,peak,steps,sh)
        tag=f'tune {form} peak {peak} ratio {ratio} shifted {sh} ordered {ordered}'
        report(tag+' own forward',tm)
        f=fold_batch_norm(tm) if form=='raw' else tm
        if form=='raw': report(tag+' folded then skipping',swap(f,ratio))
        report(tag+' nothing skipped',swap(f,1.0))
        for r in (.35,.25): report(tag+f' at {r}',swap(f,r))
